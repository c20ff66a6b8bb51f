"""After a step: finishing requests, metrics and /server_info."""
