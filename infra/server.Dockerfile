# The control API and the runner: see compose.yaml
#   docker build -f infra/server.Dockerfile -t elastic-server .
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
RUN python -m venv /opt/elastic \
 && grep -v '^torch==' requirements.txt > /tmp/pins.txt \
 && /opt/elastic/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements.txt)" \
 && /opt/elastic/bin/pip install --no-cache-dir --constraint /tmp/pins.txt '.[train,server]'

FROM python:3.11-slim
RUN useradd --create-home --uid 10001 elastic && install -d -o elastic -m 0711 /var/lib/elastic
COPY --from=build /opt/elastic /opt/elastic
ENV PATH=/opt/elastic/bin:$PATH
USER elastic
WORKDIR /home/elastic
VOLUME /var/lib/elastic
EXPOSE 7430
ENTRYPOINT ["elastic"]
CMD ["serve", "--home", "/var/lib/elastic", "--host", "0.0.0.0"]
