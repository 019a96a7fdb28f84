"""Backends to try the suite on: correct ones, and one or more broken ones for each property."""
