"""Bytes on a socket: HTTP/1.1 through h11, and the sentinel that watches for the client's leaving."""
