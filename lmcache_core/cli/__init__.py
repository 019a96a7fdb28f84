"""The command line: `lmcache-core`."""
