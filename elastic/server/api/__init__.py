"""The HTTP interface: who asks, what may be asked, and what the answers look like."""
