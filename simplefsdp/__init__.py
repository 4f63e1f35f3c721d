"""Fully sharded data parallel training that the compiler can see."""
