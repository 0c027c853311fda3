#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {

void register_attention(nb::module_& m);
void register_plan(nb::module_& m);
void register_linear(nb::module_& m);
void register_rowwise(nb::module_& m);
void register_decoder(nb::module_& m);
void register_probe(nb::module_& m);

namespace {

void register_machine(nb::module_& m) {
  m.def("set_num_threads", &set_num_threads, "num_threads"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Threads that kernels use, the caller included; 0 means all CPUs of this process. Returns what is in force.");
  m.def("num_threads", &num_threads, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "supported_isas",
      [] {
        std::vector<std::string> names;
        for (const Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
        return names;
      },
      "Instruction sets that this CPU can run, worst first.");
  m.def("isa", [] { return std::string(isa_name(current_isa())); }, "The instruction set in force.");
  m.def("set_isa", &set_isa, "name"_a, "Forces an instruction set; ValueError when this CPU cannot run it.");
}

}  // namespace
}  // namespace chunkserve

NB_MODULE(_cpu, m) {
  m.doc() = "Native CPU kernels: two-phase partition attention and the products around it.";
  chunkserve::register_machine(m);
  chunkserve::register_plan(m);
  chunkserve::register_attention(m);
  chunkserve::register_linear(m);
  chunkserve::register_rowwise(m);
  chunkserve::register_decoder(m);
  chunkserve::register_probe(m);
}
