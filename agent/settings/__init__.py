"""What the operator asked: sources, their order, and how names become a layout."""
