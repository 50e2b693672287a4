"""Message channels over memory, byte streams, standard streams, HTTP and WebSocket. They import no server or client."""
