"""The properties, a module for each group."""
