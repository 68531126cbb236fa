# Sluice on Linux: `docker build --target gateway .` is the HTTP gateway alone, a small image without MLX; the default is a
# worker. EXTRA=cuda builds one for NVIDIA GPUs (run it with --gpus all), the default is for CPUs.
FROM python:3.12-slim AS base
ENV PATH=/opt/sluice/bin:$PATH PYTHONUNBUFFERED=1
# Volumes that are mounted at these folders get their owner; without them root owns a volume, and nothing is stored.
RUN useradd --create-home --uid 1000 sluice \
    && install -d -o sluice /home/sluice/.cache /home/sluice/.cache/huggingface /home/sluice/keys /home/sluice/runs
WORKDIR /app
STOPSIGNAL SIGTERM

# What is installed is copied from here: neither sources nor pip's files are in an image.
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/sluice
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY schemas schemas
COPY sluice sluice
COPY worker worker

FROM build AS build-gateway
RUN /opt/sluice/bin/pip install --no-cache-dir --constraint constraints.txt "./sluice[cli,serve,traces]"

FROM build AS build-worker
ARG EXTRA=worker
RUN /opt/sluice/bin/pip install --no-cache-dir --constraint constraints.txt "./sluice[cli,serve,traces]" ".[$EXTRA]"

FROM base AS gateway
COPY --from=build-gateway /opt/sluice /opt/sluice
USER 1000
CMD ["sluice", "serve"]

FROM base AS worker
# MLX compiles kernels at run time on the CPU; OpenBLAS makes its fp32 products some thirty times faster.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s "$(find /usr/lib -path '*openblas-pthread/libblas.so.3')" /usr/local/lib/libblas-fast.so
ENV LD_PRELOAD=/usr/local/lib/libblas-fast.so
COPY --from=build-worker /opt/sluice /opt/sluice
USER 1000
CMD ["python", "-m", "worker"]
