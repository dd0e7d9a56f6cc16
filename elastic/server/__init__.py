"""The hosted control API: many runs, many people.

- Every run is a process of its own; the server starts it, reads its journal, and is no part of its token path.
- What was acknowledged is in the store; a server that dies and comes back finds every run again, and starts none twice.
"""

from elastic.system.logs import show_no_locals

show_no_locals()  # Keys and sessions are local variables here.
