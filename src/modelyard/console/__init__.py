"""The web console: server-rendered pages over the controller's state, no build step, nothing from a CDN."""
