"""Tests of the built site in a browser: `make site` builds it and runs them."""
