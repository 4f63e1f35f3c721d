"""Predict a training run on hardware that is not there: time, communication, memory."""
