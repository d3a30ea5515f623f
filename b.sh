CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 VDNN_BUILD_TESTING=ON .venv/bin/python setup.py --quiet build_ext --inplace
