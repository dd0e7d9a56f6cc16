resource "aws_s3_bucket" "weights" {
  bucket = var.bucket
}

resource "aws_s3_bucket_public_access_block" "weights" {
  bucket = aws_s3_bucket.weights.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}
