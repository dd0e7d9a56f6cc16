locals {
  worker_role = "elastic-${var.runs}-worker"

  # What the policies name.
  names = {
    region    = var.region
    account   = data.aws_caller_identity.own.account_id
    runs      = var.runs
    bucket    = var.bucket
    template  = aws_launch_template.worker.id
    queue_arn = aws_sqs_queue.notices.arn
    worker    = local.worker_role
  }
}

resource "aws_iam_role" "orchestrator" {
  name = "elastic-${var.runs}-orchestrator"
  # Policies compare this tag with those of instances. A session may narrow it to one run (`--tags elastic:run=…`).
  tags = { "elastic:run" = var.runs }

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { AWS = var.trusted_principals }
    }]
  })
}

resource "aws_iam_role_policy" "orchestrator" {
  name   = "elastic"
  role   = aws_iam_role.orchestrator.id
  policy = templatefile("${path.module}/policies/orchestrator.json", local.names)
}

resource "aws_iam_role" "worker" {
  name = local.worker_role

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "worker" {
  name   = "elastic"
  role   = aws_iam_role.worker.id
  policy = templatefile("${path.module}/policies/worker.json", local.names)
}

resource "aws_iam_instance_profile" "worker" {
  name = local.worker_role
  role = aws_iam_role.worker.name
}
