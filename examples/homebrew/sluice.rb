# A formula for a tap of your own. `scripts/package FOLDER URL` builds what it installs, and fills in what begins with @.
class Sluice < Formula
  desc "Chat models on Apple MLX behind a message queue"
  url "@URL@/@WORKER@", using: :nounzip
  version "@VERSION@"
  sha256 "@WORKER_SHA256@"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.12"

  resource "client" do
    url "@URL@/@CLIENT@", using: :nounzip
    sha256 "@CLIENT_SHA256@"
  end

  resource "constraints" do
    url "@URL@/constraints.txt", using: :nounzip
    sha256 "@CONSTRAINTS_SHA256@"
  end

  # MLX is on PyPI as wheels alone, so pip fetches it and its other packages in the versions of constraints.txt.
  def install
    resource("client").stage buildpath
    resource("constraints").stage buildpath
    system Formula["python@3.12"].opt_bin/"python3.12", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt",
           "./@CLIENT@[cli,serve]", "./@WORKER@[worker,server]"
    bin.install_symlink libexec/"bin/sluice"
  end

  def caveats
    "Start everything with a model: sluice up --model FOLDER_OR_HUB_ID. At each login: sluice service install up"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/sluice --version")
    assert_match "MLX device", shell_output("#{bin}/sluice doctor", nil)
  end
end
