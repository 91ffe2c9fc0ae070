#!/bin/bash
# ECS on Amazon Linux 2023: gpunode watches, measures and serves. ECS cannot give out MIG instances, so
# gpunode refuses to make any here; MIG found on is reported as critical.
set -eu
echo 'ECS_CLUSTER=example' >> /etc/ecs/ecs.config
aws s3 cp s3://example-bucket/gpunode-0.1.0-1.x86_64.rpm /tmp/gpunode.rpm
dnf install -y python3.11 /tmp/gpunode.rpm
cat > /etc/gpunode/config.toml <<'EOF'
[gpunode]
enforcement = "observe"
EOF
systemctl start --no-block gpunode.service
