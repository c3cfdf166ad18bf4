"""The web page on live runs and histories: the answers to the requests of a browser."""
