"""The pure core of a run: an event and the time go in, commands come out.

- It reads no clock, opens no socket and has no event loop; policies that it asks are pure, too.
- The same events at the same times always lead to the same state, so a journal can be replayed.
- Everything that waits has a name and a deadline.
"""
