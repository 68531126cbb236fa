# A worker on Linux. EXTRA=cuda builds for NVIDIA GPUs (run it with --gpus all), the default for CPUs.
FROM python:3.12-slim
ARG EXTRA=worker
# MLX compiles kernels at run time on the CPU; OpenBLAS makes its fp32 products some thirty times faster.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s "$(find /usr/lib -path '*openblas-pthread/libblas.so.3')" /usr/local/lib/libblas-fast.so
ENV LD_PRELOAD=/usr/local/lib/libblas-fast.so
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY schemas schemas
COPY sluice sluice
COPY worker worker
RUN pip install --no-cache-dir --constraint constraints.txt "./sluice[cli,serve,traces]" ".[$EXTRA]" && useradd --create-home sluice
USER sluice
# A volume that is mounted here gets its owner from this folder; without it root owns the volume, and no model is fetched.
RUN mkdir -p /home/sluice/.cache/huggingface
STOPSIGNAL SIGTERM
CMD ["python", "-m", "worker"]
