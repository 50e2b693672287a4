"""What extensions of the protocol add to a server: tasks, pages of apps, skills."""
