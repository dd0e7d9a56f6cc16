output "config" {
  description = "For the run's configuration."

  value = <<-EOT
    [providers.ec2]
    region = "${var.region}"
    launch_template = "${aws_launch_template.worker.id}"
    queue = "${aws_sqs_queue.notices.id}"
    secret_prefix = "elastic/"
    zones = ${jsonencode(var.zones)}
    subnets = { ${join(", ", [for zone, subnet in aws_subnet.zone : "${zone} = \"${subnet.id}\""])} }

    [weights]
    relay = "s3://${aws_s3_bucket.weights.id}/elastic?region=${var.region}"
  EOT
}

output "role" {
  description = "Who orchestrates takes this role."
  value       = aws_iam_role.orchestrator.arn
}
