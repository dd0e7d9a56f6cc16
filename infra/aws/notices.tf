# What EC2 says of its instances, to a queue that the provider reads (providers.ec2.queue).

resource "aws_sqs_queue" "notices" {
  name = "elastic-${var.runs}-notices"
  # What is older is of no use: a notice gives two minutes.
  message_retention_seconds  = 600
  visibility_timeout_seconds = 30
}

resource "aws_cloudwatch_event_rule" "notices" {
  name = "elastic-${var.runs}-notices"

  event_pattern = jsonencode({
    source = ["aws.ec2"]
    "detail-type" = [
      "EC2 Spot Instance Interruption Warning",
      "EC2 Instance Rebalance Recommendation",
      "EC2 Instance State-change Notification",
    ]
  })
}

resource "aws_cloudwatch_event_target" "notices" {
  rule = aws_cloudwatch_event_rule.notices.name
  arn  = aws_sqs_queue.notices.arn
}

resource "aws_sqs_queue_policy" "notices" {
  queue_url = aws_sqs_queue.notices.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sqs:SendMessage"
      Resource  = aws_sqs_queue.notices.arn
      Principal = { Service = "events.amazonaws.com" }
      Condition = { ArnEquals = { "aws:SourceArn" = aws_cloudwatch_event_rule.notices.arn } }
    }]
  })
}
