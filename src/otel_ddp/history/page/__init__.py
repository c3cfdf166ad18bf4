"""The page that shows histories and what runs now, as answers to requests of a browser."""
