"""What clients of OpenAI's API, and of vLLM's additions to it, send and expect: bodies, answers, streams and errors.

- `errors`: refusals in the shape that clients branch on.
- `bodies`: what a client asks for, checked; what would change the answer and is not served is refused by name.
- `answers`: whole answers and streamed chunks.
"""
