"""What things cost: hardware profiles, collective and compute times, calibration of the machine at hand."""
