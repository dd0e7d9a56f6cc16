# What s3-lifecycle.json says of a bucket that is made elsewhere.

resource "aws_s3_bucket_lifecycle_configuration" "weights" {
  bucket = aws_s3_bucket.weights.id

  rule {
    id     = "elastic-unfinished-uploads"
    status = "Enabled"

    filter {
      prefix = "elastic/"
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }

  rule {
    id     = "elastic-weights-of-killed-runs"
    status = "Enabled"

    filter {
      prefix = "elastic/"
    }

    expiration {
      days = 7
    }

    noncurrent_version_expiration {
      noncurrent_days = 1
    }
  }
}
