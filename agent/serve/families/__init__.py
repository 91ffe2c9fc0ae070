"""Metric families, one subject a file; names under one namespace."""
