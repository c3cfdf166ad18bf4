"""The report of one run: JSON for programs, a page for people, a card for a terminal."""
