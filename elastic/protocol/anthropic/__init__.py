"""What clients of Anthropic's API send and expect: bodies, answers, streams and errors.

- `errors`: refusals in the shape that its clients branch on.
- `bodies`: what a client asks for, checked, and the chat that it is.
- `answers`: whole messages and streams of events.
"""
