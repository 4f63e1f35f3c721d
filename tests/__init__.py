"""Tests of the two packages; `helpers` holds what they share."""
