"""Requests that wait until their receiver takes them."""
