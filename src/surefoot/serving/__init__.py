"""The HTTP server over one engine: needs the extra `serve`. `app.create_app` is the application, `server.Server` its state."""
