"""The web page that shows live runs and histories: answers the requests of a browser."""
