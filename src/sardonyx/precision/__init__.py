"""Lower precision for the layers of a float32 model, within a bound on how far results may drop."""
