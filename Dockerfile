# `sparrow serve` of a model: docs/serve.md. No C compiler, so on a CPU only (Triton needs one).
FROM python:3.11-slim
WORKDIR /opt/sparrow
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY sparrow sparrow
COPY recipes recipes
RUN pip install --no-cache-dir -c constraints.txt ".[serve]" && useradd --create-home sparrow
USER sparrow
WORKDIR /home/sparrow
EXPOSE 8000
HEALTHCHECK --start-period=2m CMD \
    python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"
ENTRYPOINT ["sparrow", "serve", "--host", "0.0.0.0"]
CMD ["tiny"]
