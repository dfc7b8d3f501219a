# syntax=docker/dockerfile:1
# Two images: `api` (small; also migrate and deliveries) and `worker` (with torch and transformers).
#   docker build --target api -t scorekeep-api .
#   docker build --target worker -t scorekeep-worker .          CUDA build of torch, several GB
#   … --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu …      the small CPU build
FROM python:3.11-slim AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --create-home scorekeep
WORKDIR /app
# dependencies before the source: a change of code does not install them again
COPY pyproject.toml constraints.txt ./

FROM base AS api
# numpy: deliveries run the worker's code without a model
RUN pip install -c constraints.txt -e ".[api]" numpy
COPY contract contract
COPY storage storage
COPY migrations migrations
COPY api api
COPY worker worker
COPY scorekeep scorekeep
USER 10001
EXPOSE 8000
ENTRYPOINT ["python", "-P", "-m", "scorekeep"]
CMD ["api"]

FROM base AS worker
ARG TORCH_INDEX_URL=""
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -e ".[worker]"
COPY contract contract
COPY storage storage
COPY migrations migrations
COPY worker worker
COPY scorekeep scorekeep
# models by hub id are kept here: mount a volume
ENV HF_HOME=/models/hub
RUN install -d -o 10001 /models/hub
USER 10001
ENTRYPOINT ["python", "-P", "-m", "scorekeep"]
CMD ["worker"]
