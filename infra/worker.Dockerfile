# A worker that joins a run: docker run --gpus all -e ELASTIC_TICKET="$(cat machine.ticket)" elastic-worker
#   docker build -f infra/worker.Dockerfile -t elastic-worker .
# For other devices, another torch: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu128
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements.txt ./
COPY elastic elastic
COPY functions functions
COPY policies policies
COPY providers providers
COPY traces traces
# What is pinned, without what only development needs; torch apart, whose build depends on the device.
RUN python -m venv /opt/elastic \
 && grep -v '^torch==' requirements.txt > /tmp/pins.txt \
 && /opt/elastic/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements.txt)" \
 && /opt/elastic/bin/pip install --no-cache-dir --constraint /tmp/pins.txt '.[train]'

FROM python:3.11-slim
RUN useradd --create-home elastic
COPY --from=build /opt/elastic /opt/elastic
ENV PATH=/opt/elastic/bin:$PATH
USER elastic
WORKDIR /home/elastic
ENTRYPOINT ["elastic", "worker"]
