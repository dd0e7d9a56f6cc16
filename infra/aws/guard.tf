# Nothing here costs while no run goes on, but for the queue's and the bucket's cents. An instance ends with its worker,
# with its lease, and by its own clock (providers.ec2.max_life_s); this alarm is for what nobody thought of.

resource "aws_budgets_budget" "ec2" {
  count = var.monthly_usd > 0 ? 1 : 0

  name              = "elastic-${var.runs}"
  budget_type       = "COST"
  time_unit         = "MONTHLY"
  time_period_start = "2026-01-01_00:00"
  limit_amount      = tostring(var.monthly_usd)
  limit_unit        = "USD"

  cost_filter {
    name   = "Service"
    values = ["Amazon Elastic Compute Cloud - Compute"]
  }

  notification {
    comparison_operator        = "GREATER_THAN"
    notification_type          = "ACTUAL"
    threshold                  = 80
    threshold_type             = "PERCENTAGE"
    subscriber_email_addresses = [var.alarm_email]
  }
}
