"""Other libraries and an app: `dishka` (dependencies), `asgi` (web servers), `fastapi`. Each module imports its library
itself; nothing here is imported unless it is asked for."""
