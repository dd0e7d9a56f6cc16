variable "region" {
  type = string
}

variable "elastic" {
  type        = string
  description = "What pip installs: elastic-rl[vllm,aws] @ URL, of a wheel that `pip wheel --no-deps .` has made."
}

source "amazon-ebs" "worker" {
  region        = var.region
  instance_type = "g5.xlarge"
  spot_price    = "auto"
  ssh_username  = "ubuntu"
  ami_name      = "elastic-worker-{{timestamp}}"

  source_ami_filter {
    owners      = ["amazon"]
    most_recent = true

    filters = {
      name                = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)*"
      virtualization-type = "hvm"
    }
  }

  tags = {
    "elastic:image" = "worker"
  }
}

build {
  sources = ["source.amazon-ebs.worker"]

  provisioner "shell" {
    inline = [
      "sudo apt-get update",
      "sudo apt-get install --yes --no-install-recommends python3.11 python3.11-venv",
      "sudo python3.11 -m venv /opt/elastic",
      "sudo /opt/elastic/bin/pip install --no-cache-dir '${var.elastic}'",
      "sudo ln --symbolic /opt/elastic/bin/elastic /usr/local/bin/elastic",
      "elastic --version",
      # Compiled here, weights' codecs cost an instance of this type no seconds of its first pull.
      "sudo /opt/elastic/bin/python -c 'from elastic.weights.codecs import warm_up; warm_up()'",
    ]
  }
}
