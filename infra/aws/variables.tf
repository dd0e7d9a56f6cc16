variable "region" {
  type        = string
  description = "Where workers run; providers.ec2.region."
}

variable "zones" {
  type        = list(string)
  description = "Availability zones with a subnet each. More zones are more spot pools."
}

variable "runs" {
  type        = string
  description = "Names of runs begin with this. The role ends instances of these runs and of no others."

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{0,31}$", var.runs))
    error_message = "Expected up to 32 letters, digits and dashes: run.name, or what several begin with."
  }
}

variable "image" {
  type        = string
  description = "AMI of workers; `packer build worker.pkr.hcl` makes one."
}

variable "trusted_principals" {
  type        = list(string)
  description = "ARNs of users or roles that may take the orchestrator's role."
}

variable "bucket" {
  type        = string
  description = "Name of the bucket for weights, made here."
}

variable "disk_gb" {
  type        = number
  description = "Root disk of a worker: image, model and logs."
  default     = 200
}

variable "monthly_usd" {
  type        = number
  description = "Of EC2, above which `alarm_email` hears; 0 for no alarm."
  default     = 0
}

variable "alarm_email" {
  type        = string
  description = "Who hears."
  default     = ""
}
