"""What goes between processes: addresses, connections, TLS, tickets, messages, and the ends that answer."""
