"""Everything between processes: addresses, connections, TLS, tickets, messages, HTTP servers and clients."""
