"""Does a workload fit this node: manifests and task definitions against what schedulers will see."""
