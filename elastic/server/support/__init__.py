"""What somebody who was not there needs to see of a server, without its secrets."""
