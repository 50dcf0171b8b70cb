"""How endpoints are sized, against a literal reading of the source; see ``__main__.py``."""
