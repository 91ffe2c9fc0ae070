"""What is measured, on its own clock, beside reconcile."""
