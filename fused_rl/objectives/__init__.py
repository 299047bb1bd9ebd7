"""The losses, and what they are made of: surrogates, presets, aggregations, advantages, estimators."""
