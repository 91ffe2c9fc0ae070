"""Metric families, one subject a file; names under one namespace.

A family is a declaration with a function that reads a view and yields rows, so that the exposition,
the reference page and the checks all come from the same place. Families are never kept between
samples: what is not in the view has no series.
"""
