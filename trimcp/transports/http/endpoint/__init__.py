"""One server as HTTP sees it, and the way of a request from its head to its answer."""
