# Workers dial out, to the orchestrator and to AWS, and nobody dials in. Public addresses need no NAT gateway, which
# would be paid for while no run goes on.

resource "aws_vpc" "workers" {
  cidr_block           = "10.64.0.0/16"
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = "elastic-${var.runs}" }
}

resource "aws_internet_gateway" "out" {
  vpc_id = aws_vpc.workers.id
}

resource "aws_route_table" "out" {
  vpc_id = aws_vpc.workers.id

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.out.id
  }
}

resource "aws_subnet" "zone" {
  for_each = { for index, zone in var.zones : zone => index }

  vpc_id                  = aws_vpc.workers.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(aws_vpc.workers.cidr_block, 4, each.value)
  map_public_ip_on_launch = true
  tags                    = { Name = "elastic-${var.runs}-${each.key}" }
}

resource "aws_route_table_association" "zone" {
  for_each = aws_subnet.zone

  subnet_id      = each.value.id
  route_table_id = aws_route_table.out.id
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id          = aws_vpc.workers.id
  service_name    = "com.amazonaws.${var.region}.s3"
  route_table_ids = [aws_route_table.out.id]
}

resource "aws_security_group" "workers" {
  name        = "elastic-${var.runs}"
  description = "Out, and nothing in"
  vpc_id      = aws_vpc.workers.id

  egress {
    description = "To the orchestrator and to AWS"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }
}
