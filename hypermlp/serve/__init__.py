"""An HTTP server for one model, with the completions of OpenAI's API; ``hypermlp serve`` runs it."""
